// The weight tape and the ring. The order of the weights is known for the whole frame, so one warp copies the block's
// tape into shared memory as fast as stages become free, without ever waiting for activations.
#pragma once
#include "exchange.cuh"

DEV u32 ring_wait(Ctx& c) {
  Watch w = {0, 0};
#ifdef TRACE
  const u32 begun = cycles_low();
#endif
  while (!__all_sync(~0u, barrier_test(&c.s->full[c.stage], c.phase))) if (give_up(c, w, WEIGHTS)) break;
#ifdef TRACE
  c.starved += cycles_low() - begun;
#endif
  return smem(c.s->ring[c.stage]);
}
// One lane arrives for its warp. compute-sanitizer's racecheck considers only the reads of the arriving lane finished,
// so it is given a build in which every lane arrives.
#ifdef EVERY_LANE_ARRIVES
constexpr u32 READ_ARRIVALS = THREADS;
DEV void arrive_read(Ctx& c) { barrier_arrive(&c.s->empty[c.stage]); }
#else
constexpr u32 READ_ARRIVALS = WARPS;
DEV void arrive_read(Ctx& c) { if (c.lane == 0) barrier_arrive(&c.s->empty[c.stage]); }
#endif
DEV void ring_release(Ctx& c) {
  __syncwarp();
  arrive_read(c);
  if (++c.stage == RING) { c.stage = 0; c.phase ^= 1; }
}

// With -DSTILL no weights are copied: every stage counts as full although it is all zeros. The time of a frame is then
// that of its exchanges and arithmetic without the weight loads, which is the only purpose of such a build.
#ifdef STILL
DEV void fill_stage(Ctx& c, u32 stage, const u8*, u32, u64) {
  if (c.lane < FILL_ARRIVALS) barrier_arrive(&c.s->full[stage]);
}
#else
DEV void fill_stage(Ctx& c, u32 stage, const u8* from, u32 bytes, u64 policy) {
  copy_stage(c.s->ring[stage], from, bytes, &c.s->full[stage], policy, c.lane);
}
#endif
// copies: the number that a block has in flight. More of them fill the memory system's queues, and every exchange waits
// behind them; a single one achieves at most 2.7 TB/s. A short copy, such as keys and values of few positions, comes in
// addition: it takes as long as a full one (H200, 0.6B: 0.5 us of each of the talker's layers).
// Never more than the ring has stages: a barrier tells only its newest phase from the one before, so that a wait for
// the copy before a stage's newest one would not end.
static_assert(RING >= 2, "a stage is read while the next one is filled");
__host__ __device__ constexpr u32 at_most_ring(u32 copies) { return copies < RING ? copies : RING; }
// Frames (H200, ms of the talker with one and with two: 0.6B 0.342 and 0.357, 1.7B 0.997 and 0.790; of the predictor
// with two and with three 0.852 and 0.937, with one 0.900).
constexpr u32 TALKER_COPIES = at_most_ring(Talker::LAYER_BYTES * CTAS > 50 << 20 ? 2 : 1);
constexpr u32 PREDICTOR_COPIES = at_most_ring(2);
// Text (H200, 0.6B, tokens a second at ten a launch: with one 2 018, four for the head 2 162, and two for the layers
// 2 271). Nothing is exchanged while the head is read.
constexpr u32 LAYER_COPIES = at_most_ring(2), HEAD_COPIES = at_most_ring(4);
static_assert(larger(larger(TALKER_COPIES, PREDICTOR_COPIES), larger(LAYER_COPIES, HEAD_COPIES)) <= RING, "see above");
constexpr u32 MOST_NAPS = 1 << 23;   // about a second, longer than any copy and shorter than the consumers' watchdog
struct Feeder { u32 stage, phase, count, copies; bool on, was_short; };
DEV bool copied(Ctx& c, u32 n) { return barrier_test(&c.s->full[n % RING], (n / RING) & 1); }
// Whether the feeder should stop waiting, checked once in 64 polls. Its lanes copy together, so all of them get the
// same answer. To save registers it reads no clock, notes a lost copy in shared memory, and leaves the report to
// feed_end.
DEV bool feed_no_more(Ctx& c, Feeder& f, bool lost) {
  const bool over = lost || *(volatile u32*)&c.s->stop || *(volatile u32*)&c.s->dead;
  if (lost) c.s->lost = EARLIER_COPY;
  if (__all_sync(~0u, !over)) return false;
  f.on = false;
  return true;
}
DEV void feed(Ctx& c, Feeder& f, const u8* from, u32 bytes, u64 policy) {
  if (!f.on) return;
  u32 spins = 0;   // bounded, because consumers free a stage, stop, or give up by their own watchdog
  while (!__all_sync(~0u, barrier_test(&c.s->empty[f.stage], f.phase ^ 1)))
    if ((++spins & 63u) == 0 && feed_no_more(c, f, false)) return;
  if (!__all_sync(~0u, !*(volatile u32*)&c.s->stop)) { f.on = false; return; }
  const bool is_short = bytes < STAGE_BYTES / 2; const u32 copies = at_most_ring(f.copies + is_short + f.was_short);
  f.was_short = is_short;
  if (f.count >= copies) {
    u32 naps = 0;
    while (!__all_sync(~0u, copied(c, f.count - copies))) {
      if ((++naps & 63u) == 0 && feed_no_more(c, f, naps >= MOST_NAPS)) return;
      nap();
    }
  }
  fill_stage(c, f.stage, from, bytes, policy);
  f.count++; if (++f.stage == RING) { f.stage = 0; f.phase ^= 1; }
}
// Feeds a matrix of the tape: full stages, of which the last one may be short.
template <class M> DEV void feed_matrix(Ctx& c, Feeder& f, const u8*& tape, u64 policy) {
  for (int s = 0; s < M::STAGES; s++) {
    const u32 left = M::BYTES - s * STAGE_BYTES, bytes = left < STAGE_BYTES ? left : STAGE_BYTES;
    feed(c, f, tape, bytes, policy); tape += bytes;
  }
}
// Feeds all matrices of the block's rows.
template <class D> DEV void feed_dealt(Ctx& c, Feeder& f, const u8*& tape, u64 policy) {
  for (int i = 0; i < D::COUNT; i++) feed_matrix<typename D::One>(c, f, tape, policy);
}
constexpr int SLOT_BYTES = 2 * HD * 2;                 // key and value of one position
constexpr int SLOTS_PER_STAGE = STAGE_BYTES / SLOT_BYTES;
DEV int old_slots(int position, int rank) { return position > rank ? (position - rank + GROUP - 1) / GROUP : 0; }

DEV u8* kv_of(const Ctx& c, int layer) {
  return c.u->kv + ((u64)(layer * NKV + c.group) * GROUP + c.rank) * (u64)c.u->slots * SLOT_BYTES;
}

template <class S, bool TALKER>
DEV void feed_layer(Ctx& c, Feeder& f, const u8* tape, int layer, int position, u64 policy) {
  feed_dealt<typename S::Qkv>(c, f, tape, policy);
  if (TALKER) {
    const u8* kv = kv_of(c, layer);
    const int n = old_slots(position, c.rank);
    for (int i = 0; i < n; i += SLOTS_PER_STAGE)
      feed(c, f, kv + (u64)i * SLOT_BYTES, (n - i < SLOTS_PER_STAGE ? n - i : SLOTS_PER_STAGE) * SLOT_BYTES, policy);
  }
  feed_dealt<typename S::Out>(c, f, tape, policy);
  feed_dealt<typename S::GateUp>(c, f, tape, policy);
  feed_dealt<typename S::Down>(c, f, tape, policy);
}
// Never return while a copy into this block's shared memory is in flight, whether the launch continues, ends or gave
// up: another block may get that memory next. A copy waits for nothing, so one that exceeds `timeout_ns` is lost.
DEV void feed_end(Ctx& c, const Feeder& f) {
  if (c.s->lost) lose(c.p, c.s, c.block, c.tid, c.tag, c.s->lost);
  Watch w = {0, 0};
  for (u32 n = f.count - at_most_ring(f.count); n != f.count; n++)
    while (!__all_sync(~0u, copied(c, n))) {
      if ((++w.spins & 63u) != 0) continue;
      const u64 now = nanoseconds();
      if (w.since == 0) w.since = now;
      const bool lost = now - w.since > c.p->timeout_ns;
      if (lost) lose(c.p, c.s, c.block, c.tid, c.tag, LAST_COPIES);
      if (!__all_sync(~0u, !lost)) return;
    }
}
