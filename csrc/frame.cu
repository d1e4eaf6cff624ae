// One Qwen3-TTS frame in one launch: talker step, code 0, sixteen predictor positions, codes 1-15, embedding sum.
// A launch makes `frames` frames in a row, delivers each to the host as soon as it is ready, and stops at end of speech
// or at the host's request.
#include "stages.cuh"

template <class H> DEV void head_logits(Ctx& c, u32 tag, int rows) {
  Fragments<H> w; preload(c, w);
  float v[1]; gemv<H>(c, w, v);
  const int first = c.block * WARPS * H::WARP_ROWS, row = held_row<H>(c, rows - first);
  if (row >= 0) publish(&c.p->exchange->logits[first + row], tag, v[0]);
}

// Projects the talker's hidden state, still in vec, to the predictor's width.
DEV void project(Ctx& c, Row<Predictor>& x) {
  typedef Projection M;
  const u32 tag = ++c.tag;
  Fragments<M> w; preload(c, w);
  float v[1]; gemv<M>(c, w, v);
  constexpr int EACH = ceil_div(P_H, CTAS);
  const int first = c.block * EACH, left = P_H - first;
  const int row = held_row<M>(c, P_H % CTAS == 0 || left > EACH ? EACH : left), id = first + row;
  if (row >= 0) publish(&c.p->exchange->projected[id], tag, v[0] + from_bf16(c.p->projection_bias[id]));
  UNROLL for (int g = 0; g < Predictor::GRANULES; g++) {
    u32 a = 0, b = 0;                                 // a thread that owns nothing still takes part in sum_squares
    if (owns<Predictor>(c, g)) poll4(c, &c.p->exchange->projected[element<Predictor>(c, g)], tag, a, b);
    x.v[g][0] = low(a); x.v[g][1] = high(a); x.v[g][2] = low(b); x.v[g][3] = high(b);
  }
  block_sync();                                               // all warps have read vec before it is written again
}

// The weights of a launch in the order of their use.
DEV void feeder(Ctx& c) {
  const Params& p = *c.p; const Stream& u = *c.u; Feeder f = {0, 0, 0, TALKER_COPIES, true, false};
  const u64 policy = stream_policy();
  for (int i = 0; i < p.frames && f.on; i++) {
    f.copies = TALKER_COPIES;
    if (p.prefill || u.frame + i > 0)
      for (int l = 0; l < T_L && f.on; l++) {
        const u8* tape = p.talker_tape + ((u64)c.block * T_L + l) * Talker::LAYER_BYTES;
        feed_layer<Talker, true>(c, f, tape, l, u.position + i, policy);
      }
    if (p.prefill) continue;
    const u8* head = p.talker_head_tape + (u64)c.block * TalkerHead::BYTES;
    feed_matrix<TalkerHead>(c, f, head, policy);
    const u8* projection = p.projection_tape + (u64)c.block * Projection::BYTES;
    if (PROJECTED) feed_matrix<Projection>(c, f, projection, policy);
    f.copies = PREDICTOR_COPIES;
    for (int book = 1; book < CODES && f.on; book++) {
      for (int l = 0; l < P_L && f.on; l++) {
        const u8* tape = p.predictor_tape + ((u64)c.block * P_L + l) * Predictor::LAYER_BYTES;
        feed_layer<Predictor, false>(c, f, tape, l, 0, policy);
      }
      head = p.predictor_head_tape + ((u64)(book - 1) * CTAS + c.block) * PredictorHead::BYTES;
      feed_matrix<PredictorHead>(c, f, head, policy);
    }
  }
  feed_end(c, f);
}

// A predictor pass over NT positions, up to the logits of `book`, from which every block draws the same code.
template <int NT> DEV int predict(Ctx& c, int book, int frame, Row<Predictor> (&x)[NT]) {
  const Params& p = *c.p; Norm<Predictor> norm;
  load_norm<Predictor>(c, p.predictor_norms, norm);
  layers<Predictor, false, NT>(c, book + 1 - NT, x, norm, p.predictor_norms, p.predictor_final);
  MARK(c, 14);
  final_norm<Predictor>(c, x[NT - 1], norm);
  const u32 tag = ++c.tag;
  head_logits<PredictorHead>(c, tag, VP);
  MARK(c, 15);
  const int code = sample<VP>(c, tag, book, frame);
  MARK(c, 16);
  return code;
}
// Replaces NO_NUMBER by code 0 and clears `numbers`; the host then ends the stream.
DEV int number(int code, bool& numbers) {
  numbers &= code != NO_NUMBER;
  return code == NO_NUMBER ? 0 : code;
}
DEV void consumer(Ctx& c) {
  const Params& p = *c.p; const Stream& u = *c.u; Shared& s = *c.s;
  const bool scribe = c.block == 0 && c.tid == 0;
  Row<Talker> hidden, sum;
  load_row<Talker>(c, u.hidden, hidden); load_row<Talker>(c, u.sum, sum);
  bool ended = false;
  for (int i = 0; i < p.frames && !s.dead; i++) {
    const int frame = u.frame + i;
    int* out = u.out + STATUS_WORDS + i * FRAME_WORDS;
    const u64 begun = nanoseconds();
    if (p.prefill || frame > 0) {                     // the talker's input: a prompt row, or previous frame plus text
      const u16* row = u.rows + (u64)i * T_H;
      if (p.prefill) load_row<Talker>(c, row, hidden);
      else { hidden = sum; add_row<Talker>(c, row, hidden); }
      talk(c, u.position + i, hidden, p.debug_hidden ? p.debug_hidden + (u64)i * T_L * T_H : nullptr);
    } else { to_vec<Talker>(c, 0, hidden); block_sync(); }
    if (p.prefill) continue;
    u32 tag = ++c.tag;
    head_logits<TalkerHead>(c, tag, VT);
    MARK(c, 15);
    bool numbers = true;
    int code = number(sample<VT>(c, tag, 0, frame), numbers);
    MARK(c, 16);
    if (code == p.ends[0]) { ended = true; s.stop = 1; break; }
    if (c.tid == 0) s.seen[code >> 5] |= 1u << (code & 31);
    load_row<Talker>(c, p.embeddings0 + (u64)code * T_H, sum);
    Row<Predictor> x[2];                              // the predictor's first input: the talker's state and code 0
    load_row<Predictor>(c, p.inputs0 + (u64)code * P_H, x[1]);
    if constexpr (PROJECTED) project(c, x[0]);
    else UNROLL for (int g = 0; g < Predictor::GRANULES; g++)
      UNROLL for (int k = 0; k < 4; k++) x[0].v[g][k] = hidden.v[g][k];
    const u64 talked = nanoseconds();
    if (scribe) { out[0] = code; out[CODES] = (int)(talked - begun); }
    code = number(predict<2>(c, 1, frame, x), numbers);
    const u32 asked = ++c.tag; ask_host(c, asked);
    for (int book = 1;; book++) {
      if (scribe) out[book] = code;
      add_row<Talker>(c, p.embeddings + ((u64)(book - 1) * VP + code) * T_H, sum);
      if (book + 1 == CODES) break;
      Row<Predictor> one[1];
      load_row<Predictor>(c, p.inputs + ((u64)(book - 1) * VP + code) * P_H, one[0]);
      code = number(predict<1>(c, book + 1, frame, one), numbers);
    }
    round_row<Talker>(sum);
    if (scribe && !*(volatile u32*)&s.dead) {
      out[CODES + 1] = (int)(nanoseconds() - talked); out[CODES + 2] = !numbers;
      put32_host(u.out + MADE, i + 1);
    }
    if (i + 1 < p.frames && !wanted(c, asked)) { s.stop = 1; break; }
  }
  if (c.block == 0) {
    store_row<Talker>(c, u.hidden, hidden); store_row<Talker>(c, u.sum, sum);
    block_sync();
    for (u32 i = c.tid; i < VT / 32; i += THREADS) u.seen[i] = s.seen[i];
    if (scribe) u.out[ENDED] = ended;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + FEED_THREADS, 1) mktts_frames(const __grid_constant__ Params p) {
  run<feeder, consumer>(p);
}
