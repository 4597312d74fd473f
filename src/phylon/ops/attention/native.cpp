// Attention on CPUs: the C interface. Everything is described in tile.h (arithmetic), layout.h (what a call is), scores.h,
// forward.h and backward.h.
#include "backward.h"

extern "C" {

// Output and log-sum-exp. `dtype` 0: float, 1: bfloat16.
void attention_forward(const Call* call, int64_t dtype) { dtype == 0 ? forward<float>(*call) : forward<bf16>(*call); }

// All gradients, from the output and the log-sum-exp of the forward pass.
void attention_backward(const Call* call, int64_t dtype) { dtype == 0 ? backward<float>(*call) : backward<bf16>(*call); }
}
