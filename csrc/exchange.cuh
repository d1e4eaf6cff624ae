// How blocks hand values to each other without a grid barrier.
//
// A word says itself whether it is fresh: [tag:16 | bf16:16], the tag counting exchanges. A reader polls the data, not
// a flag, so there is no fence, no counter to reset, and nothing an aborted launch can leave in a wrong state but tags,
// which the host clears. A buffer is written again only after an all-to-all exchange that every reader has passed.
//
// A sum over groups goes to the block that owns the rows, which adds in a fixed order and mails the result to BOXES
// boxes, of which every block polls one.
#pragma once
#include "state.cuh"

// By value: a variable whose address is taken lives in local memory, and every poll would go there.
constexpr u64 GAVE_UP = ~0ull;
__device__ __noinline__ u64 give_up_slow(const Params* p, Shared* s, u32 block, u32 tid, u32 tag, u64 since, int what) {
  if (get32((u32*)&p->status[0])) { s->dead = 1; return GAVE_UP; }
  const u64 now = nanoseconds();
  if (since == 0) return now;
  if (now - since <= p->timeout_ns) return since;
  s->dead = 1;
  put32((u32*)&p->status[1], block); put32((u32*)&p->status[2], tid);
  put32((u32*)&p->status[3], what); put32((u32*)&p->status[4], tag);
  put32((u32*)&p->status[0], 1);
  return GAVE_UP;
}
struct Watch { u32 spins; u64 since; };
DEV bool give_up(Ctx& c, Watch& w, int what) {
  if ((++w.spins & 255u) != 0) return false;
  if (*(volatile u32*)&c.s->dead) return true;
  w.since = give_up_slow(c.p, c.s, c.block, c.tid, c.tag, w.since, what);
  return w.since == GAVE_UP;
}

DEV void publish(u32* word, u32 tag, float value) { put32(word, (tag << 16) | to_bf16(value)); }

// Four words -> four bf16 in two registers.
// Polls leave their loop as a whole warp: lanes that leave one by one diverge, which cost 0.2 ms a frame.
DEV void poll4(Ctx& c, const u32* p, u32 tag, u32& a, u32& b) {   // whole warps, or the lanes of a warp that are active
  u32 v[4]; Watch w = {0, 0}; const u32 t = tag << 16; const u32 active = __activemask();
  for (;;) {
    get32x4(p, v);
    const bool ok = (((v[0] ^ t) | (v[1] ^ t) | (v[2] ^ t) | (v[3] ^ t)) >> 16) == 0;
    if (__all_sync(active, ok) || give_up(c, w, 1)) break;
  }
  a = __byte_perm(v[0], v[1], 0x5410); b = __byte_perm(v[2], v[3], 0x5410);
}
template <int N> DEV void poll64n(Ctx& c, const u64* p, u32 step, u32 tag, float (&out)[N]) {
  Watch w = {0, 0};
  for (;;) {
    u64 v[N]; u32 bad = 0;
    UNROLL for (int i = 0; i < N; i++) v[i] = get64(p + i * step);
    UNROLL for (int i = 0; i < N; i++) { bad |= (u32)(v[i] >> 32) ^ tag; out[i] = __uint_as_float((u32)v[i]); }
    if (__all_sync(~0u, bad == 0) || give_up(c, w, 3)) break;
  }
}

// Rows of H that a block owns: block (group g, rank r) owns RPO of them from (r * NKV + g) * RPO on, if there are such.
template <int H> DEV u32 first_owned(const Ctx& c) {
  return c.rank * (NKV * Owned<H>::RPO) + c.group * Owned<H>::RPO;
}
template <int H> DEV bool owns_rows(const Ctx& c) {
  return H == CTAS * Owned<H>::RPO || first_owned<H>(c) < H;
}
// `row`: within the rows that this rank was dealt.
template <int H> DEV void send_part(Ctx& c, int n, u32 row, u32 tag, float value) {
  constexpr int RPO = Owned<H>::RPO, EACH = ceil_div(H, GROUP);
  u32 owner = row / RPO * GROUP + c.rank;                          // where every rank owns the rows that it was dealt
  if constexpr (EACH != NKV * RPO) {
    row += c.rank * EACH;
    owner = row / RPO % NKV * GROUP + row / (RPO * NKV);
  }
  u64* to = &c.p->exchange->parts[owner][n][c.group][row % RPO];
  put64(to, ((u64)tag << 32) | __float_as_uint(value));
}
// Warp 0 of the owner: residual + sum over groups, mailed to all boxes.
template <int H, int NT> DEV void own_rows(Ctx& c, int half, u32 (*boxes)[POSITIONS][MAXH], u32 tag) {
  constexpr int RUN = Owned<H>::RPO < 32 ? Owned<H>::RPO : 32;     // rows at a time
  constexpr int WORDS = NKV * RUN, PER = ceil_div(WORDS, 32), STRIDE = MOST_OWNED;
  static_assert(H % Owned<H>::RPO == 0 && RUN % 4 == 0, "owners have whole runs, boxes take four rows at once");
  static_assert(WORDS % 32 == 0 || WORDS < 32, "whole warps of words");
  if (!owns_rows<H>(c)) return;
  for (int run = 0; run < Owned<H>::RPO; run += RUN) UNROLL for (int n = 0; n < NT; n++) {
    const u32 base = first_owned<H>(c) + run, row = run + c.lane % RUN, i = c.lane % WORDS;
    const u64* from = &c.p->exchange->parts[c.block][n][0][0] + run + i / RUN * STRIDE + i % RUN;
    float part[PER], sum = 0.f;
    poll64n<PER>(c, from, 32 / RUN * STRIDE, tag, part);
    UNROLL for (int k = 0; k < PER; k++) sum += c.lane < WORDS ? part[k] : 0.f;
    __syncwarp();
    UNROLL for (int m = RUN; m < 32; m *= 2) sum += shuffle_xor(sum, m);
    const u32 word = (tag << 16) | to_bf16(from_bf16(c.s->residual[half][n][row]) + round_bf16(sum));
    u32 w[4];
    UNROLL for (int j = 0; j < 4; j++) w[j] = __shfl_sync(~0u, word, c.lane % (RUN / 4) * 4 + j);
    constexpr int AT_ONCE = 32 / (RUN / 4);
    UNROLL for (int k = 0; k < ceil_div(BOXES, AT_ONCE); k++) {
      const u32 to = k * AT_ONCE + c.lane / (RUN / 4);
      if (to < BOXES) put32x4(&boxes[(to + c.block) % BOXES][n][base + c.lane % (RUN / 4) * 4], w);
    }
  }
}
