// The kernels of this folder, one library: see the headers.

#include "conv.h"
#include "selective_backward.h"
#include "step.h"
