// Attention on CPUs: the C interface. Everything is described in ../native/tile.h (arithmetic), layout.h (what a call
// is), scores.h, widened.h and paired.h (products in f32, and in bf16 on AMX), forward.h and backward.h.
//
// PHYLON_AMX compiles the products in bf16 for AMX, PHYLON_AMX_EMULATED for any processor.
#include "backward.h"
#include "few.h"
#if defined(PHYLON_AMX) || defined(PHYLON_AMX_EMULATED)
#include "paired.h"
#endif

namespace {

#if defined(PHYLON_AMX) || defined(PHYLON_AMX_EMULATED)
using Low = Paired;
#else
using Low = Widened<bf16>;
#endif

// The call with no more threads than it has work for: waking a thread takes as long as this many products.
Call crewed(const Call& call) {
    Call c = call;
    double products = double(c.B) * c.H * c.T * double(std::min(c.S, c.most - c.least + 1)) * double(c.E + c.Ev);
    c.threads = std::clamp<int64_t>(int64_t(products / 3e5), 1, c.threads);
    return c;
}

}  // namespace

extern "C" {

// Output and log-sum-exp. `dtype` 0: float, 1: bfloat16.
void attention_forward(const Call* call, int64_t dtype) {
    dtype == 0 ? forward<Widened<float>>(crewed(*call)) : forward<Low>(crewed(*call));
}

// The output alone, for few queries and heads that share a key head; without dropout.
void attention_few(const Call* call, int64_t dtype) {
    dtype == 0 ? few<float>(crewed(*call)) : few<bf16>(crewed(*call));
}

// All gradients, from the output and the log-sum-exp of the forward pass.
void attention_backward(const Call* call, int64_t dtype) {
    dtype == 0 ? backward<Widened<float>>(crewed(*call)) : backward<Low>(crewed(*call));
}
}
