// Mamba-2's scan on CPUs: the C interface. What a call is stands in chunks.h; the passes in forward.h and backward.h.
#include "backward.h"
#include "forward.h"

extern "C" {

// Numbers of the buffer `starts`.
int64_t ssd_starts(const Scan *s) {
  return Plan(s->batch, s->length, s->resets, nullptr).kept * s->heads * s->state();
}

// Fills y and the last state (B, H, P, N); `starts` is null where no backward pass follows.
void ssd_forward(const Scan *s, const View *y, float *last, float *starts) {
  const Plan plan(s->batch, s->length, s->resets, s->real);
  const int threads = s->batch * s->length * s->heads * s->width * s->size < 1 << 16 ? 1 : int(s->threads);
  if (s->length == 1 && !starts) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < s->batch * s->heads; i++)
      step(*s, plan.chunks[i / s->heads], i / s->heads, i % s->heads, *y, last);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t i = 0; i < s->tasks(); i++) forward_task(*s, plan, Task(*s, i), *y, last, starts);
}

void ssd_backward(const Scan *s, const Gradients *grad) {
  const Plan plan(s->batch, s->length, s->resets, s->real);
#pragma omp parallel for schedule(dynamic) num_threads(s->threads)
  for (int64_t i = 0; i < s->tasks(); i++) {
    const Task task(*s, i);
    Backward(*s, plan, *grad, task).run();
  }
}
}
