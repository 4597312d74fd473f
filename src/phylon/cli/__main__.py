"""``python -m phylon.cli``: the command line, for launchers that start modules (``torchrun -m phylon.cli train …``)."""

import sys

from phylon.cli.main import main

sys.exit(main())
