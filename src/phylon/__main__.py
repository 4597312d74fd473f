"""``python -m phylon``: the command line, for launchers that start modules (``torchrun -m phylon train …``)."""

import sys

from phylon.cli.main import main

sys.exit(main())
