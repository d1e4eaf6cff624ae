// The weight tape and the ring. The order of the weights is known for the whole frame, so one warp copies each block's
// tape into shared memory as fast as stages come free, never waiting for activations.
#pragma once
#include "exchange.cuh"

DEV u32 ring_wait(Ctx& c) {
  Watch w = {0, 0};
#ifdef TRACE
  const u32 begun = cycles_low();
#endif
  while (!__all_sync(~0u, barrier_test(&c.s->full[c.stage], c.phase))) if (give_up(c, w, 5)) break;
#ifdef TRACE
  c.starved += cycles_low() - begun;
#endif
  return smem(c.s->ring[c.stage]);
}
// One lane speaks for its warp. compute-sanitizer's racecheck counts only the lane that arrives as having finished its
// reads, so it is shown a build in which every lane does.
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

// With -DSTILL no weights are copied: every stage counts as full as it lies there, all zeros. What a frame then takes
// is its chain of exchanges and arithmetic without the stream beside it, which is all that such a build is for.
#ifdef STILL
DEV void fill_stage(Ctx& c, u32 stage, const u8*, u32, u64) {
  if (c.lane < FILL_ARRIVALS) barrier_arrive(&c.s->full[stage]);
}
#else
DEV void fill_stage(Ctx& c, u32 stage, const u8* from, u32 bytes, u64 policy) {
  copy_stage(c.s->ring[stage], from, bytes, &c.s->full[stage], policy, c.lane);
}
#endif
// copies: that a block has under way. More of them fill the memory system's queues, and every exchange waits behind
// them; one alone moves no more than 2.7 TB/s. Each kernel says what suits its parts. A short one, as of few positions'
// keys and values, comes on top: it takes as long as a whole one (H200, 0.6B: 0.5 us of each of the talker's layers).
struct Feeder { u32 stage, phase, count, copies; bool on, was_short; };
DEV void feed(Ctx& c, Feeder& f, const u8* from, u32 bytes, u64 policy) {
  if (!f.on) return;
  u32 spins = 0;
  while (!barrier_test(&c.s->empty[f.stage], f.phase ^ 1))
    if ((++spins & 63u) == 0 && (*(volatile u32*)&c.s->stop || *(volatile u32*)&c.s->dead)) { f.on = false; return; }
  if (*(volatile u32*)&c.s->stop) { f.on = false; return; }
  const bool is_short = bytes < STAGE_BYTES / 2; const u32 copies = f.copies + is_short + f.was_short;
  f.was_short = is_short;
  if (f.count >= copies) {
    const u32 n = f.count - copies;
    while (!barrier_test(&c.s->full[n % RING], (n / RING) & 1)) nap();
  }
  fill_stage(c, f.stage, from, bytes, policy);
  f.count++; if (++f.stage == RING) { f.stage = 0; f.phase ^= 1; }
}
// A matrix of the tape: whole stages, the last one may be short.
template <class M> DEV void feed_matrix(Ctx& c, Feeder& f, const u8*& tape, u64 policy) {
  for (int s = 0; s < M::STAGES; s++) {
    const u32 left = M::BYTES - s * STAGE_BYTES, bytes = left < STAGE_BYTES ? left : STAGE_BYTES;
    feed(c, f, tape, bytes, policy); tape += bytes;
  }
}
// What a block was dealt.
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
// Never leave while a copy into this block's shared memory is in flight.
DEV void feed_end(Ctx& c, const Feeder& f) {
  const u32 live = f.count < RING ? f.count : RING;
  for (u32 i = 0; i < live; i++) {
    const u32 n = f.count - live + i;
    while (!barrier_test(&c.s->full[n % RING], (n / RING) & 1)) {}
  }
}
