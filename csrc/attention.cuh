// Attention of one new position. The blocks of a group share one key-value head.
#pragma once
#include "gemv.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr int VALUES = HD / 32;               // head dimensions a lane holds: lane * VALUES + i
DEV float score_scale() { return rsqrtf((float)HD) * LOG2E; }

// RMSNorm and rotary embedding of one head across a warp, rounded where the model rounds. Loaded values stay packed
// until they are used: unpacking them at once would wait for the loads before the poll that hides their latency.
struct Rotation { u32 w[2], cosine[2], sine[2]; };
DEV void fetch_values(const u16* from, u32 (&v)[2]) {
  if (VALUES == 4) fetch8(from, v[0], v[1]);
  else { v[0] = v[1] = 0; UNROLL for (int i = 0; i < VALUES; i++) v[i / 2] |= (u32)from[i] << i % 2 * 16; }
}
DEV float value_of(const u32 (&v)[2], int i) { return i & 1 ? high(v[i / 2]) : low(v[i / 2]); }
DEV Rotation load_rotation(const Ctx& c, const u16* weight, const u16* cosines, const u16* sines) {
  Rotation r; const u32 d = c.lane * VALUES, a = d % (HD / 2);
  fetch_values(weight + d, r.w); fetch_values(cosines + a, r.cosine); fetch_values(sines + a, r.sine);
  return r;
}
DEV void norm_rotate(const Ctx& c, float (&v)[VALUES], const Rotation& t) {
  float ss = 0.f;
  UNROLL for (int i = 0; i < VALUES; i++) ss += v[i] * v[i];
  const float r = rsqrtf(warp_sum(ss) * (1.f / HD) + EPS);
  UNROLL for (int i = 0; i < VALUES; i++) {
    const float x = round_bf16(value_of(t.w, i) * round_bf16(v[i] * r)), y = shuffle_xor(x, 16);
    v[i] = round_bf16(round_bf16(x * value_of(t.cosine, i)) +
                      round_bf16((c.lane & 16 ? y : -y) * value_of(t.sine, i)));
  }
}
constexpr int HEADS = QPK + 2;                // of a group: queries, key, value
// A warp receives one head of the group from the exchange: VALUES words per lane.
DEV void poll_head(Ctx& c, int n, u32 head, u32 tag, float (&v)[VALUES]) {
  const u32* words = &c.p->exchange->qkv[c.group][n][head * HD + c.lane * VALUES];
  if (VALUES == 4) {
    u32 a, b; poll4(c, words, tag, a, b);
    const float all[4] = {low(a), high(a), low(b), high(b)};
    UNROLL for (int i = 0; i < VALUES; i++) v[i] = all[i];
  } else {
    Watch w = {0, 0};
    UNROLL for (int i = 0; i < VALUES; i++) for (;;) {
      const u32 x = get32(words + i);
      v[i] = low(x);
      if (__all_sync(~0u, (x >> 16) == (tag & 0xffffu)) || give_up(c, w, HEAD_WORDS)) break;
    }
  }
}
template <int N> DEV void store_bf16(u16* to, const float (&v)[N]) {
  if (N == 1) *to = to_bf16(v[0]);
  else UNROLL for (int i = 0; i + 1 < N; i += 2) *(u32*)(to + i) = pack(v[i], v[i + 1]);
}

// Predictor: at most 16 positions; the whole key-value head is in shared memory, and every block of the group computes
// all of it.
template <int NT> DEV void predictor_attention(Ctx& c, int layer, int first_position, u32 tag) {
  Shared& s = *c.s; const Params& p = *c.p;
  for (u32 i = c.warp; i < NT * HEADS; i += WARPS) {
    const u32 n = i / HEADS, head = i % HEADS; const int position = first_position + n;
    const u16* weight = p.predictor_qk + (layer * 2 + (head >= QPK)) * HD;
    const int angle = position * (HD / 2);
    const Rotation turn = load_rotation(c, weight, p.predictor_cos + angle, p.predictor_sin + angle);
    float v[VALUES]; poll_head(c, n, head, tag, v); __syncwarp();
    if (head <= QPK) norm_rotate(c, v, turn);
    u16* to = head < QPK ? s.q[n][head] : head == QPK ? s.key[layer][position] : s.value[layer][position];
    store_bf16(to + c.lane * VALUES, v);
  }
  block_sync();
  MARK(c, 11);
  // Every warp computes the scores of one head over 16 positions (two n = 8 tiles), then its part of the outputs.
  constexpr int OF_HEAD = WARPS / QPK;                                   // warps of one head
  constexpr int DIMS = HD / OF_HEAD, PER = (DIMS + 31) / 32;             // output dimensions of a warp, of a lane
  const u32 h = c.warp / OF_HEAD, first = c.warp % OF_HEAD * DIMS;
  UNROLL for (int n = 0; n < NT; n++) {
    float sc[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
    UNROLL for (int k = 0; k < HD / 16; k++) {
      u32 a[4] = {0, 0, 0, 0}, b0, b1;
      if (c.lane < 4) lds64(smem(&s.q[n][h][k * 16 + c.lane * 4]), a[0], a[2]);
      UNROLL for (int t = 0; t < 2; t++) {
        lds64(smem(&s.key[layer][t * 8 + (c.lane >> 2)][k * 16 + (c.lane & 3) * 4]), b0, b1);
        mma(sc[t], a, b0, b1);
      }
    }
    float m = -1e30f, l = 0.f, w[2][2], o[PER];
    const int of_lane = (c.lane & 3) * 2;
    UNROLL for (int t = 0; t < 2; t++) UNROLL for (int i = 0; i < 2; i++) {
      w[t][i] = t * 8 + of_lane + i <= first_position + n ? sc[t][i] * score_scale() : -1e30f;
      m = fmaxf(m, w[t][i]);
    }
    m = fmaxf(m, shuffle_xor(m, 1)); m = fmaxf(m, shuffle_xor(m, 2));
    UNROLL for (int t = 0; t < 2; t++) UNROLL for (int i = 0; i < 2; i++) {
      w[t][i] = exp2_fast(w[t][i] - m);
      l += w[t][i];
    }
    l += shuffle_xor(l, 1); l += shuffle_xor(l, 2);
    const float inverse = __frcp_rn(__shfl_sync(~0u, l, 0));
    UNROLL for (int i = 0; i < PER; i++) o[i] = 0.f;
    UNROLL for (int j = 0; j < CODES; j++) {
      const float weight = __shfl_sync(~0u, w[j >> 3][j & 1], (j & 7) >> 1);
      UNROLL for (int i = 0; i < PER; i++)
        o[i] += weight * from_bf16(s.value[layer][j][first + (c.lane * PER + i) % DIMS]);
    }
    UNROLL for (int i = 0; i < PER; i++) if (c.lane * PER + i < DIMS) {
      const u32 at = vec_offset<Predictor::Out::K>(h * HD + first + c.lane * PER + i);
      *(u16*)((u8*)s.inner[n] + at) = to_bf16(o[i] * inverse);
    }
  }
  block_sync();
}

// Talker: position p of a head is stored by block p % GROUP; each block attends to its own, then the group combines.
DEV void attend_slot(const Ctx& c, const u16* k, const u16* v, float (&m)[QPK], float (&l)[QPK],
                     float (&o)[QPK][VALUES]) {
  const u32 d = c.lane * VALUES;
  UNROLL for (int h = 0; h < QPK; h++) {
    float dot = 0.f;
    UNROLL for (int i = 0; i < VALUES; i++) dot += from_bf16(c.s->q[0][h][d + i]) * from_bf16(k[d + i]);
    const float sc = warp_sum(dot) * score_scale();
    const float top = fmaxf(sc, m[h]), a = exp2_fast(m[h] - top), w = exp2_fast(sc - top);
    m[h] = top; l[h] = l[h] * a + w;
    UNROLL for (int i = 0; i < VALUES; i++) o[h][i] = o[h][i] * a + w * from_bf16(v[d + i]);
  }
}
// Polls all blocks' partial outputs of one dimension, and one block's maximum and sum, in one round trip.
template <u32 STEP> DEV void poll_parts(Ctx& c, const u64* outs, const u64* scale, u32 tag, float (&out)[GROUP],
                                        float& top, float& sum) {
  Watch w = {0, 0};
  for (;;) {
    const u64 a = get64(scale), b = get64(scale + 1); u64 v[GROUP];
    UNROLL for (int j = 0; j < GROUP; j++) v[j] = get64(outs + j * STEP);
    u32 bad = ((u32)(a >> 32) ^ tag) | ((u32)(b >> 32) ^ tag);
    UNROLL for (int j = 0; j < GROUP; j++) { bad |= (u32)(v[j] >> 32) ^ tag; out[j] = __uint_as_float((u32)v[j]); }
    top = __uint_as_float((u32)a); sum = __uint_as_float((u32)b);
    if (__all_sync(~0u, bad == 0) || give_up(c, w, PARTS)) break;
  }
}
DEV void talker_attention(Ctx& c, int layer, int position, u32 tag, u32 tag_att, Fragments<Talker::Out>& out_weights) {
  Shared& s = *c.s; const Params& p = *c.p; Exchange& x = *p.exchange;
  const bool owner = position % GROUP == (int)c.rank;
  u8* kv = kv_of(c, layer);
  if (c.warp < HEADS) {
    const u16* weight = p.talker_qk + (layer * 2 + (c.warp >= QPK)) * HD;
    const int angle = position * (HD / 2);
    const Rotation turn = load_rotation(c, weight, p.talker_cos + angle, p.talker_sin + angle);
    float v[VALUES]; poll_head(c, 0, c.warp, tag, v); __syncwarp();
    if (c.warp <= QPK) norm_rotate(c, v, turn);
    store_bf16((c.warp < QPK ? s.q[0][c.warp] : c.warp == QPK ? s.k : s.v) + c.lane * VALUES, v);
  }
  block_sync();
  MARK(c, 11);
  float m[QPK], l[QPK], o[QPK][VALUES];
  UNROLL for (int h = 0; h < QPK; h++) {
    m[h] = -1e30f; l[h] = 0.f;
    UNROLL for (int i = 0; i < VALUES; i++) o[h][i] = 0.f;
  }
  const int old = old_slots(position, c.rank);
  for (int b = 0; b < old; b += SLOTS_PER_STAGE) {
    const int n = old - b < SLOTS_PER_STAGE ? old - b : SLOTS_PER_STAGE;
    ring_wait(c);
    const u16* stage = (const u16*)s.ring[c.stage];
    for (int i = c.warp; i < n; i += WARPS) attend_slot(c, stage + i * 2 * HD, stage + i * 2 * HD + HD, m, l, o);
    ring_release(c);
  }
  preload(c, out_weights);
  if (owner && c.warp == WARPS - 1) attend_slot(c, s.k, s.v, m, l, o);
  UNROLL for (int h = 0; h < QPK; h++) {
    UNROLL for (int i = 0; i < VALUES; i++) s.partial[c.warp][h][c.lane * VALUES + i] = o[h][i];
    if (c.lane == 0) { s.partial[c.warp][h][HD] = m[h]; s.partial[c.warp][h][HD + 1] = l[h]; }
  }
  block_sync();
  MARK(c, 12);
  for (int i = c.tid; i < QPK * HD; i += THREADS) {
    const int h = i / HD, d = i % HD;
    float top = -1e30f, sum = 0.f, out = 0.f;
    UNROLL for (int w = 0; w < WARPS; w++) top = fmaxf(top, s.partial[w][h][HD]);
    UNROLL for (int w = 0; w < WARPS; w++) {
      const float a = exp2_fast(s.partial[w][h][HD] - top);
      sum += s.partial[w][h][HD + 1] * a; out += s.partial[w][h][d] * a;
    }
    u64* to = x.part[c.group][i / SHARE][c.rank];
    const u64 t = (u64)tag << 32;
    put64(to + i % SHARE, t | __float_as_uint(out));
    if (i % SHARE == 0) {
      put64(to + SHARE, t | __float_as_uint(top));
      put64(to + SHARE + 1, t | __float_as_uint(sum));
    }
  }
  if (c.warp < ceil_div(SHARE, 32) && c.rank < SHARES) {
    const u64* from = x.part[c.group][c.rank][0];
    const u32 mine = SHARE > 32 ? c.tid : c.lane;                  // dimension of the share
    constexpr u32 STEP = sizeof(x.part[0][0][0]) / 8;
    float top, sum, out[GROUP], value = 0.f;                       // lane j: maximum and sum of block j
    poll_parts<STEP>(c, from + mine % SHARE, from + SHARE + c.lane % GROUP * STEP, tag, out, top, sum);
    float best = top;
    UNROLL for (int m = 16; m; m >>= 1) best = fmaxf(best, shuffle_xor(best, m));
    const float a = exp2_fast(top - best), total = warp_sum(c.lane < GROUP ? a * sum : 0.f);
    UNROLL for (int j = 0; j < GROUP; j++) value += out[j] * __shfl_sync(~0u, a, j);
    if (mine < SHARE) publish(&x.att[c.group][c.rank * SHARE + mine], tag_att, value / total);
  }
  MARK(c, 13);
  if (owner && c.warp == WARPS - 1) {           // after the exchanges, so that other blocks do not wait for this
    u32* slot = (u32*)(kv + (u64)(position / GROUP) * SLOT_BYTES);
    for (u32 i = c.lane; i < HD; i += 32) slot[i] = i < HD / 2 ? ((const u32*)s.k)[i] : ((const u32*)s.v)[i - HD / 2];
    proxy_fence();                              // a later frame reads it through the copy engine
  }
  if (c.tid < QPK * HD / 4) {
    u32 a, b; poll4(c, &x.att[c.group][c.tid * 4], tag_att, a, b);
    sts64(smem(s.inner[0]) + vec_offset<Talker::Out::K>(c.tid * 4), a, b);
  }
  block_sync();
}
