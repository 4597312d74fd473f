// The kernels of this folder, one library: see the headers.

#include "conv.h"
#include "selective.h"
#include "step.h"
