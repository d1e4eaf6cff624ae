// Choosing a code. Every block sees all logits and draws the same code itself, so the choice costs no exchange.
//
// Philox4x32-10 (Salmon et al. 2011) with counters (id / 4, codebook, frame, stream) gives Gumbel noise; the largest
// logit / T + noise is a draw from the softmax. Top-k without a sort: accept the winner if fewer than k logits are
// above its own, otherwise draw again among those; this keeps ties with the k-th, as transformers does.
#pragma once
#include "layer.cuh"

constexpr float NEVER = -3.0e38f;

// log by IEEE multiply and add only (Cephes logf), so that a CPU gives the same bits
DEV float exact_log(float x) {
  const u32 b = __float_as_uint(x); int e = (int)(b >> 23) - 126; float m = __uint_as_float((b & 0x007fffffu) | 0x3f000000u);
  if (m < 0.707106781186547524f) { e -= 1; m = __fadd_rn(__fadd_rn(m, m), -1.0f); } else m = __fadd_rn(m, -1.0f);
  const float z = __fmul_rn(m, m); float y = 7.0376836292E-2f;
  const float k[8] = {-1.1514610310E-1f, 1.1676998740E-1f, -1.2420140846E-1f, 1.4249322787E-1f, -1.6668057665E-1f, 2.0000714765E-1f, -2.4999993993E-1f, 3.3333331174E-1f};
  UNROLL for (int i = 0; i < 8; i++) y = __fadd_rn(__fmul_rn(y, m), k[i]);
  y = __fmul_rn(__fmul_rn(y, m), z);
  const float fe = (float)e;
  y = __fadd_rn(y, __fmul_rn(fe, -2.12194440e-4f)); y = __fadd_rn(y, __fmul_rn(z, -0.5f));
  return __fadd_rn(__fadd_rn(m, y), __fmul_rn(fe, 0.693359375f));
}
DEV void philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1, u32 (&r)[4]) {
  UNROLL for (int i = 0; i < 10; i++) {
    const u32 h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0; k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  r[0] = c0; r[1] = c1; r[2] = c2; r[3] = c3;
}
DEV float gumbel(u32 r) {
  const float u = __fmul_rn(__fadd_rn((float)(r >> 9), 0.5f), 1.1920928955078125e-07f);   // (k + 1/2) 2^-23, exact, in (0, 1)
  return -exact_log(-exact_log(u));
}
DEV u32 ordered(float f) { const u32 b = __float_as_uint(f); return (b & 0x80000000u) ? ~b : (b | 0x80000000u); }

template <int V> DEV int sample(Ctx& c, u32 tag, int book, int frame) {
  constexpr int N = ceil_div(V, 4 * THREADS);
  Shared& s = *c.s; const Params& p = *c.p;
  const bool first = book == 0;
  const int greedy = first ? p.greedy0 : p.greedy;
  float l[N][4], score[N][4];
  if (!greedy) UNROLL for (int g = 0; g < N; g++) {        // noise does not depend on the logits: before the wait
    u32 r[4]; philox(g * THREADS + c.tid, book, frame, p.stream_id, p.seed_lo, p.seed_hi, r);
    UNROLL for (int i = 0; i < 4; i++) score[g][i] = gumbel(r[i]);
  }
  const float it = first ? p.inverse_temperature0 : p.inverse_temperature; const u32 top_k = first ? p.top_k0 : p.top_k;
  UNROLL for (int g = 0; g < N; g++) {
    const int id = 4 * (g * THREADS + c.tid);
    u32 a = 0, b = 0;
    const bool mine = V % (4 * THREADS) == 0 || id < V;
    if (mine) poll4(c, &p.exchange->logits[id], tag, a, b);
    if (p.debug && c.block == 0 && mine) { u32* d = (u32*)(p.debug + ((u64)(frame - p.frame) * CODES + book) * VT + id); d[0] = a; d[1] = b; }
    l[g][0] = low(a); l[g][1] = high(a); l[g][2] = low(b); l[g][3] = high(b);
    UNROLL for (int i = 0; i < 4; i++) {
      if (first) {
        if ((s.seen[(id + i) >> 5] >> ((id + i) & 31)) & 1u) l[g][i] = l[g][i] > 0.f ? __fdiv_rn(l[g][i], p.penalty) : l[g][i] * p.penalty;
        if ((id + i >= p.suppress_from && id + i != p.eos) || (id + i == p.eos && frame < p.min_frames)) l[g][i] = NEVER;
      }
      if (!mine) l[g][i] = NEVER;
      if (l[g][i] > NEVER) l[g][i] = __fmul_rn(l[g][i], it);
      score[g][i] = greedy ? l[g][i] : __fadd_rn(l[g][i], score[g][i]);
    }
  }
  float floor = NEVER; int win = 0;                          // candidates: l > floor
  for (int round = 0; round < V; round++) {
    u32 best = 0; int at = 0; float logit = NEVER;
    UNROLL for (int g = 0; g < N; g++) UNROLL for (int i = 0; i < 4; i++) if (l[g][i] > floor) {
      const u32 k = ordered(score[g][i]);
      if (k > best) { best = k; at = 4 * (g * THREADS + c.tid) + i; logit = l[g][i]; }
    }
    const u32 top = __reduce_max_sync(~0u, best);
    const u32 id = __reduce_min_sync(~0u, best == top && best ? at : 0x7fffffff);
    if (best == top && best && at == (int)id) { s.best[c.warp] = ((u64)top << 32) | (u32)~id; s.best_logit[c.warp] = logit; }
    if (top == 0 && c.lane == 0) { s.best[c.warp] = 0; s.best_logit[c.warp] = NEVER; }
    block_sync();
    u64 key = 0; float bl = NEVER;
    UNROLL for (int w = 0; w < WARPS; w++) if (s.best[w] > key) { key = s.best[w]; bl = s.best_logit[w]; }
    win = key ? (int)~(u32)key : 0;
    if (greedy || top_k == 0) { block_sync(); break; }
    u32 n = 0;
    UNROLL for (int g = 0; g < N; g++) UNROLL for (int i = 0; i < 4; i++) n += l[g][i] > bl;
    n = __reduce_add_sync(~0u, n);
    if (c.lane == 0) s.above[c.warp] = n;
    block_sync();
    n = 0; UNROLL for (int w = 0; w < WARPS; w++) n += s.above[w];
    if (n < top_k || *(volatile u32*)&s.dead) break;
    floor = bl;
  }
  return win;
}
