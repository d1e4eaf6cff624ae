// Samples a code. Every block reads all logits and draws the same code itself, so the choice needs no exchange.
//
// Philox4x32-10 (Salmon et al. 2011) with counters (id / 4, codebook, frame, stream) gives Gumbel noise; the argmax of
// logit / T + noise is a draw from the softmax. Top-k needs no sort: accept the winner if fewer than k logits are above
// its own, otherwise draw again among those; ties with the k-th are kept, as in transformers. Top-p likewise: accept
// the winner if the mass above it is less than top_p of what top-k keeps, else draw again among those above.
#pragma once
#include "layer.cuh"

constexpr float NEVER = -3.0e38f;

// log from IEEE multiplications and additions only (Cephes logf), so that a CPU gives the same bits
DEV float exact_log(float x) {
  const u32 b = __float_as_uint(x);
  int e = (int)(b >> 23) - 126;
  float m = __uint_as_float((b & 0x007fffffu) | 0x3f000000u);
  if (m < 0.707106781186547524f) { e -= 1; m = __fadd_rn(__fadd_rn(m, m), -1.0f); } else m = __fadd_rn(m, -1.0f);
  const float z = __fmul_rn(m, m);
  float y = 7.0376836292E-2f;
  const float k[8] = {-1.1514610310E-1f, 1.1676998740E-1f, -1.2420140846E-1f, 1.4249322787E-1f,
                      -1.6668057665E-1f, 2.0000714765E-1f, -2.4999993993E-1f, 3.3333331174E-1f};
  UNROLL for (int i = 0; i < 8; i++) y = __fadd_rn(__fmul_rn(y, m), k[i]);
  y = __fmul_rn(__fmul_rn(y, m), z);
  const float fe = (float)e;
  y = __fadd_rn(y, __fmul_rn(fe, -2.12194440e-4f)); y = __fadd_rn(y, __fmul_rn(z, -0.5f));
  return __fadd_rn(__fadd_rn(m, y), __fmul_rn(fe, 0.693359375f));
}
DEV void philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1, u32 (&r)[4]) {
  UNROLL for (int i = 0; i < 10; i++) {
    const u32 h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    const u32 h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  r[0] = c0; r[1] = c1; r[2] = c2; r[3] = c3;
}
DEV float gumbel(u32 r) {
  const float u = __fmul_rn(__fadd_rn((float)(r >> 9), 0.5f), 1.1920928955078125e-07f);   // (k + 1/2) 2^-23, in (0, 1)
  return -exact_log(-exact_log(u));
}
DEV u32 ordered(float f) { const u32 b = __float_as_uint(f); return (b & 0x80000000u) ? ~b : (b | 0x80000000u); }

// The sampling settings of one choice.
struct Choice { int greedy; u32 top_k; float temperature, top_p; };
DEV Choice choice_of(const Ctx& c, bool first) {
  const Stream& u = *c.u;
  if (first) return {u.greedy0, (u32)u.top_k0, u.temperature0, u.top_p0};
  return {u.greedy, (u32)u.top_k, u.temperature, u.top_p};
}
// Repetition penalty, minimum length and suppressed ids: code 0 only.
DEV float admit(const Ctx& c, float l, int id, int frame) {
  const Params& p = *c.p; const float penalty = c.u->penalty;
  if ((c.s->seen[id >> 5] >> (id & 31)) & 1u) l = l > 0.f ? __fdiv_rn(l, penalty) : l * penalty;
  return (id >= p.suppress_from && id != p.ends[0]) || (id == p.ends[0] && frame < p.min_frames) ? NEVER : l;
}
DEV float block_sum(Ctx& c, float v) {
  v = warp_sum(v);
  block_sync();
  if (c.lane == 0) c.s->mass[c.warp] = v;
  block_sync();
  v = 0.f; UNROLL for (int w = 0; w < WARPS; w++) v += c.s->mass[w];
  return v;
}
// The total mass for top-p: the sum of exp(l - most) over the `top_k` largest logits, including ties with the last of
// them. Finds the k-th by bisection.
template <int N> DEV float kept_mass(Ctx& c, const float (&l)[N][4], u32 top_k, float most) {
  u32 least = 0;                                            // the largest key that at least top_k logits reach
  if (top_k) for (u32 bit = 1u << 31; bit; bit >>= 1) {
    u32 n = 0;
    UNROLL for (int g = 0; g < N; g++) UNROLL for (int i = 0; i < 4; i++) n += ordered(l[g][i]) >= (least | bit);
    if (block_sum(c, (float)n) >= (float)top_k) least |= bit;
  }
  float sum = 0.f;
  UNROLL for (int g = 0; g < N; g++) UNROLL for (int i = 0; i < 4; i++)
    if (l[g][i] > NEVER && ordered(l[g][i]) >= least) sum += __expf(l[g][i] - most);
  return block_sum(c, sum);
}

// Polls all logits of a thread in one round trip.
template <int V> DEV void poll_logits(Ctx& c, const u32* from, u32 tag, u32 (&out)[ceil_div(V, 4 * THREADS)][2]) {
  constexpr int N = ceil_div(V, 4 * THREADS);
  Watch w = {0, 0}; const u32 t = tag << 16;
  for (;;) {
    u32 bad = 0;
    UNROLL for (int g = 0; g < N; g++) {
      const int id = 4 * (g * THREADS + c.tid);
      u32 v[4] = {t, t, t, t};
      if (V % (4 * THREADS) == 0 || id < V) get32x4(from + id, v);
      bad |= (v[0] ^ t) | (v[1] ^ t) | (v[2] ^ t) | (v[3] ^ t);
      out[g][0] = __byte_perm(v[0], v[1], 0x5410); out[g][1] = __byte_perm(v[2], v[3], 0x5410);
    }
    if (__all_sync(~0u, (bad >> 16) == 0) || give_up(c, w, WORDS)) break;
  }
}
// Thread t holds logits 4 * (t + 256 g) + i. Every warp offers its best; the best of all wins unless its rank excludes
// it, and then ids that are not above the highest refused offer are excluded from the next round. NO_NUMBER if no logit
// is finite: NaN compares above nothing, so there are no offers.
constexpr int NO_NUMBER = -1;
template <int V> DEV int sample(Ctx& c, u32 tag, int book, int frame) {
  constexpr int N = ceil_div(V, 4 * THREADS);
  static_assert(WARPS % 2 == 0 && V < 1 << 16, "two 16-bit counts a word");
  Shared& s = *c.s; const Params& p = *c.p;
  const Choice choice = choice_of(c, book == 0);
  float l[N][4], score[N][4];
  if (!choice.greedy) UNROLL for (int g = 0; g < N; g++) { // noise does not depend on logits: computed before the wait
    u32 r[4]; philox(g * THREADS + c.tid, book, frame, 0, c.u->seed_lo, c.u->seed_hi, r);
    UNROLL for (int i = 0; i < 4; i++) score[g][i] = gumbel(r[i]);
  }
  float most = NEVER;
  u32 words[N][2];
  poll_logits<V>(c, p.exchange->logits, tag, words);
  UNROLL for (int g = 0; g < N; g++) {
    const int id = 4 * (g * THREADS + c.tid);
    const u32 a = words[g][0], b = words[g][1];
    const bool mine = V % (4 * THREADS) == 0 || id < V;
    if (p.debug_logits && c.block == 0 && mine) {
      u32* d = (u32*)(p.debug_logits + ((u64)(frame - c.u->frame) * CODES + book) * VT + id);
      d[0] = a; d[1] = b;
    }
    l[g][0] = low(a); l[g][1] = high(a); l[g][2] = low(b); l[g][3] = high(b);
    UNROLL for (int i = 0; i < 4; i++) {
      if (book == 0 && mine) l[g][i] = admit(c, l[g][i], id + i, frame);
      if (!mine) l[g][i] = NEVER;
      if (!choice.greedy && l[g][i] > NEVER) l[g][i] = __fdiv_rn(l[g][i], choice.temperature);
      score[g][i] = choice.greedy ? l[g][i] : __fadd_rn(l[g][i], score[g][i]);
      most = fmaxf(most, l[g][i]);
    }
  }
  float limit = 0.f;
  const bool nucleus = !choice.greedy && choice.top_p < 1.f;
  if (nucleus) {
    UNROLL for (int m = 16; m; m >>= 1) most = fmaxf(most, shuffle_xor(most, m));
    block_sync();
    if (c.lane == 0) s.mass[c.warp] = most;
    block_sync();
    UNROLL for (int w = 0; w < WARPS; w++) most = fmaxf(most, s.mass[w]);
    limit = choice.top_p * kept_mass(c, l, choice.top_k, most);
  }
  float floor = NEVER; int floor_id = 0x7fffffff;           // candidates: (l, id) > (floor, floor_id)
  for (int round = 0; round < V; round++) {
    u32 best = 0; int at = 0; float logit = NEVER;
    UNROLL for (int g = 0; g < N; g++) UNROLL for (int i = 0; i < 4; i++) {
      const int id = 4 * (g * THREADS + c.tid) + i; const u32 k = ordered(score[g][i]);
      if ((l[g][i] > floor || (l[g][i] == floor && id > floor_id)) && k > best) { best = k; at = id; logit = l[g][i]; }
    }
    const u32 top = __reduce_max_sync(~0u, best);
    const u32 first = __reduce_min_sync(~0u, best == top && best ? at : 0x7fffffff);
    if (best == top && best && at == (int)first) {
      s.best[c.warp] = ((u64)top << 32) | (u32)~first;
      s.best_logit[c.warp] = logit;
    }
    if (top == 0 && c.lane == 0) { s.best[c.warp] = 0; s.best_logit[c.warp] = NEVER; }
    block_sync();
    u64 key = 0; float offered[WARPS]; int winner = 0;
    UNROLL for (int w = 0; w < WARPS; w++) {
      offered[w] = s.best_logit[w];
      if (s.best[w] > key) { key = s.best[w]; winner = w; }
    }
    const int win = key ? (int)~(u32)key : NO_NUMBER;
    float won = NEVER;
    UNROLL for (int w = 0; w < WARPS; w++) if (w == winner) won = offered[w];
    if (!key || choice.greedy || (choice.top_k == 0 && !nucleus)) { block_sync(); return win; }
    if (choice.top_k) {
      u32 above[WARPS / 2];
      UNROLL for (int w = 0; w < WARPS / 2; w++) above[w] = 0;
      UNROLL for (int g = 0; g < N; g++) UNROLL for (int i = 0; i < 4; i++) UNROLL for (int w = 0; w < WARPS; w++)
        above[w / 2] += (u32)(l[g][i] > offered[w]) << (w % 2 * 16);
      UNROLL for (int w = 0; w < WARPS / 2; w++) {
        above[w] = __reduce_add_sync(~0u, above[w]);
        if (c.lane == 0) s.above[c.warp][w] = above[w];
      }
      block_sync();
      bool refused = false;
      UNROLL for (int w = 0; w < WARPS; w++) {
        u32 n = 0; UNROLL for (int v = 0; v < WARPS; v++) n += s.above[v][w / 2] >> (w % 2 * 16) & 0xffffu;
        if (n < choice.top_k) continue;
        if (offered[w] >= floor) { floor = offered[w]; floor_id = 0x7fffffff; }
        refused |= w == winner;
      }
      if (*(volatile u32*)&s.dead) return win;
      if (refused) continue;
    }
    if (!nucleus) return win;
    float sum = 0.f;                                        // mass above the winner in the order of (l, id)
    UNROLL for (int g = 0; g < N; g++) UNROLL for (int i = 0; i < 4; i++) {
      const int id = 4 * (g * THREADS + c.tid) + i;
      if (l[g][i] > won || (l[g][i] == won && id > win)) sum += __expf(l[g][i] - most);
    }
    if (block_sum(c, sum) < limit || *(volatile u32*)&s.dead) return win;
    if (won > floor || (won == floor && win > floor_id)) { floor = won; floor_id = win; }
  }
  return 0;
}
