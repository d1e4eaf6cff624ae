// Qwen3 text, token by token: embedding row, layers, norm, head, choice; the talker's stack with a text model's
// weights. A launch makes `frames` tokens in a row, delivers each to the host as soon as it is ready, and stops at an
// end id or at the host's request.
//
// No block has all logits: each keeps those of its rows, and the blocks agree on a token by exchanging offers and sums.
#include "stages.cuh"

constexpr int HEAD_ROWS = ceil_div(VT, CTAS);                             // of a block
constexpr int HEAD_CHUNKS = ceil_div(HEAD_ROWS, 2 * WARPS * 16);          // a lane holds one row of a chunk
constexpr int CHUNK_ROWS = round_up(ceil_div(HEAD_ROWS, HEAD_CHUNKS), 2 * WARPS);
typedef Mat<CHUNK_ROWS, T_H> HeadChunk;

// Logits are kept in registers if the card has enough blocks; many chunks would not fit, and would compile too slowly.
constexpr int HEAD_UNROLL = HEAD_CHUNKS <= 8 ? HEAD_CHUNKS : 1;
#define UNROLL_HEAD _Pragma("unroll HEAD_UNROLL")

struct Logits { float l[HEAD_CHUNKS]; int id[HEAD_CHUNKS]; };             // id -1: none

DEV void head_logits(Ctx& c, Logits& x, u16* debug) {
  const int row = held_row<HeadChunk>(c, CHUNK_ROWS);
  UNROLL_HEAD for (int k = 0; k < HEAD_CHUNKS; k++) {
    Fragments<HeadChunk> w; preload(c, w);
    float v[1]; gemv<HeadChunk>(c, w, v);
    const int id = (c.block * HEAD_CHUNKS + k) * CHUNK_ROWS + row;
    x.id[k] = row >= 0 && id < VT ? id : -1;
    x.l[k] = x.id[k] >= 0 ? round_bf16(v[0]) : NEVER;
    if (debug && x.id[k] >= 0) debug[id] = (u16)to_bf16(v[0]);
  }
}

struct Offer { u32 key; int id; float l; };                               // key 0: nothing to offer
DEV Offer better(const Offer& a, const Offer& b) { return b.key > a.key || (b.key == a.key && b.id < a.id) ? b : a; }
DEV Offer best_of_warp(Offer o) {
  UNROLL for (int m = 16; m; m >>= 1) {
    const Offer other = {__shfl_xor_sync(~0u, o.key, m), __shfl_xor_sync(~0u, o.id, m), shuffle_xor(o.l, m)};
    o = better(o, other);
  }
  return o;
}
constexpr int WAVES = ceil_div(CTAS, 32);                                 // warps needed to read a word of every block
static_assert(WAVES <= WARPS, "a lane for every block");

// The best offer of all threads of all blocks.
DEV Offer agree(Ctx& c, Offer mine) {
  Shared& s = *c.s; const u32 tag = ++c.tag; u64 (*offers)[3] = c.p->exchange->offers[tag & 1];
  mine = best_of_warp(mine);
  block_sync();
  if (c.lane == 0) { s.best[c.warp] = ((u64)mine.key << 32) | (u32)mine.id; s.best_logit[c.warp] = mine.l; }
  block_sync();
  if (c.warp == 0) {
    const u32 w = c.lane % WARPS;
    mine = best_of_warp({(u32)(s.best[w] >> 32), (int)(u32)s.best[w], s.best_logit[w]});
    const u32 word = c.lane == 0 ? mine.key : c.lane == 1 ? (u32)mine.id : __float_as_uint(mine.l);
    if (c.lane < 3) put64(&offers[c.block][c.lane], ((u64)tag << 32) | word);
  }
  if (c.warp < WAVES) {
    float v[3]; poll64n<3>(c, offers[(c.warp * 32 + c.lane) % CTAS], 1, tag, v);
    mine = best_of_warp({__float_as_uint(v[0]), (int)__float_as_uint(v[1]), v[2]});
    if (c.lane == 0) { s.agreed[c.warp] = ((u64)mine.key << 32) | (u32)mine.id; s.mass[c.warp] = mine.l; }
  }
  block_sync();
  Offer all = {0, 0x7fffffff, NEVER};
  UNROLL for (int w = 0; w < WAVES; w++)
    all = better(all, {(u32)(s.agreed[w] >> 32), (int)(u32)s.agreed[w], s.mass[w]});
  return all;
}
// A sum over all threads of all blocks, with the same bits in every block.
DEV float sum_all(Ctx& c, float v) {
  Shared& s = *c.s; const u32 tag = ++c.tag; u64* sums = c.p->exchange->sums[tag & 1];
  v = block_sum(c, v);
  if (c.tid == 0) put64(&sums[c.block], ((u64)tag << 32) | __float_as_uint(v));
  block_sync();
  if (c.warp < WAVES) {
    float w[1]; poll64n<1>(c, &sums[(c.warp * 32 + c.lane) % CTAS], 0, tag, w);
    v = warp_sum(c.warp * 32 + c.lane < CTAS ? w[0] : 0.f);
    if (c.lane == 0) s.mass[c.warp] = v;
  }
  block_sync();
  v = 0.f; UNROLL for (int w = 0; w < WAVES; w++) v += s.mass[w];
  return v;
}

// As `sample` in sampling.cuh, over all blocks: an offer wins unless its rank excludes it, and with it all below it.
DEV int choose(Ctx& c, Logits& x, int index) {
  const Choice choice = choice_of(c, true);
  float score[HEAD_CHUNKS], most = NEVER;
  u32 raw[HEAD_CHUNKS];
  UNROLL_HEAD for (int k = 0; k < HEAD_CHUNKS; k++) {
    score[k] = x.l[k]; raw[k] = ordered(x.l[k]) >> 16;
    if (choice.greedy || x.id[k] < 0) continue;
    x.l[k] = __fdiv_rn(x.l[k], choice.temperature);
    u32 r[4]; philox(x.id[k] / 4, 0, index, 0, c.u->seed_lo, c.u->seed_hi, r);
    const u32 at = x.id[k] % 4;
    score[k] = __fadd_rn(x.l[k], gumbel(at & 2 ? (at & 1 ? r[3] : r[2]) : (at & 1 ? r[1] : r[0])));
  }
  const bool nucleus = !choice.greedy && choice.top_p < 1.f;
  float limit = 0.f, floor = NEVER; int floor_id = 0x7fffffff;            // candidates: (l, id) > (floor, floor_id)
  if (nucleus) {
    Offer top = {0, 0x7fffffff, NEVER};
    UNROLL_HEAD for (int k = 0; k < HEAD_CHUNKS; k++)
      if (x.id[k] >= 0) top = better(top, {ordered(x.l[k]), x.id[k], x.l[k]});
    most = agree(c, top).l;
    u32 least = 0;                                                        // the largest key that top_k logits reach
    if (choice.top_k) for (u32 bit = 1u << 15; bit; bit >>= 1) {   // 16 bits: before the temperature they are bf16
      float n = 0.f;
      UNROLL_HEAD for (int k = 0; k < HEAD_CHUNKS; k++) n += x.id[k] >= 0 && raw[k] >= (least | bit);
      if (sum_all(c, n) >= (float)choice.top_k) least |= bit;
    }
    float sum = 0.f;
    UNROLL_HEAD for (int k = 0; k < HEAD_CHUNKS; k++) {
      if (x.id[k] >= 0 && raw[k] < least) x.l[k] = NEVER;
      if (x.l[k] > NEVER) sum += __expf(x.l[k] - most);
    }
    limit = choice.top_p * sum_all(c, sum);
  }
  for (int round = 0; round < VT; round++) {
    Offer mine = {0, 0x7fffffff, NEVER};
    UNROLL_HEAD for (int k = 0; k < HEAD_CHUNKS; k++)
      if (x.l[k] > floor || (x.l[k] == floor && x.id[k] > floor_id))
        mine = better(mine, {ordered(score[k]), x.id[k], x.l[k]});
    const Offer won = agree(c, mine);
    if (choice.greedy || (choice.top_k == 0 && !nucleus) || *(volatile u32*)&c.s->dead) return won.id;
    float above = 0.f;                                                    // number of logits, or mass, above the winner
    UNROLL_HEAD for (int k = 0; k < HEAD_CHUNKS; k++) {
      const bool higher = x.l[k] > won.l;
      if (nucleus) above += higher || (x.l[k] == won.l && x.id[k] > won.id) ? __expf(x.l[k] - most) : 0.f;
      else above += higher;
    }
    above = sum_all(c, above);
    if (above < (nucleus ? limit : (float)choice.top_k)) return won.id;
    floor = won.l; floor_id = nucleus ? won.id : 0x7fffffff;
  }
  return 0;
}

DEV void feeder(Ctx& c) {
  const Params& p = *c.p; const Stream& u = *c.u; Feeder f = {0, 0, 0, LAYER_COPIES, true, false};
  const u64 policy = stream_policy();
  for (int i = 0; i < p.frames && f.on; i++) {
    f.copies = LAYER_COPIES;
    if (p.prefill || u.frame + i > 0)
      for (int l = 0; l < T_L && f.on; l++) {
        const u8* tape = p.talker_tape + ((u64)c.block * T_L + l) * Talker::LAYER_BYTES;
        feed_layer<Talker, true>(c, f, tape, l, u.position + i, policy);
      }
    if (p.prefill) continue;
    f.copies = HEAD_COPIES;
    const u8* head = p.talker_head_tape + (u64)c.block * HEAD_CHUNKS * HeadChunk::BYTES;
    for (int k = 0; k < HEAD_CHUNKS && f.on; k++) feed_matrix<HeadChunk>(c, f, head, policy);
  }
  feed_end(c, f);
}

DEV void consumer(Ctx& c) {
  const Params& p = *c.p; const Stream& u = *c.u; Shared& s = *c.s;
  const bool scribe = c.block == 0 && c.tid == 0;
  Row<Talker> hidden; load_row<Talker>(c, u.hidden, hidden);
  int token = u.token;
  bool ended = false;
  for (int i = 0; i < p.frames && !s.dead; i++) {
    const int index = u.frame + i;                                        // of the token being made
    if (p.prefill || index > 0) {
      load_row<Talker>(c, p.prefill ? u.rows + (u64)i * T_H : p.embeddings0 + (u64)token * T_H, hidden);
      talk(c, u.position + i, hidden, p.debug_hidden ? p.debug_hidden + (u64)i * T_L * T_H : nullptr);
    } else { to_vec<Talker>(c, 0, hidden); block_sync(); }
    if (p.prefill) continue;
    const u32 asked = ++c.tag; ask_host(c, asked);
    Logits x; head_logits(c, x, p.debug_logits ? p.debug_logits + (u64)i * VT : nullptr);
    token = choose(c, x, index);
    if (scribe && !*(volatile u32*)&s.dead) {
      u.out[STATUS_WORDS + i * FRAME_WORDS] = token;
      put32_host(u.out + MADE, i + 1);
    }
    UNROLL for (int k = 0; k < 4; k++) ended |= token == p.ends[k];
    if (ended || (i + 1 < p.frames && !wanted(c, asked))) { s.stop = 1; break; }
  }
  if (c.block == 0) {
    store_row<Talker>(c, u.hidden, hidden);
    if (scribe) u.out[ENDED] = ended;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + FEED_THREADS, 1) mktts_text(const __grid_constant__ Params p) {
  run<feeder, consumer>(p);
}
