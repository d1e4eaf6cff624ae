// A launch of one of csrc/rows.cu's kernels on one CPU thread: its blocks one after another, so that what they share is
// one static variable, which holds what the block before left; a block's warps in an order of chance.

static const RowsParams* launched;
static void (*kernel)(RowsParams);
constexpr size_t STACK_BYTES = 64 * 1024;   // of a lane

static void lane_main() { kernel(*launched); now->done = true; give_way(); }

static void run_block(u32 x, u32 y, std::vector<u8>& stacks, u64& seed) {
  Block block;
  block.id = x; block.row = y;
  std::vector<Lane> lanes(THREADS);
  for (int i = 0; i < THREADS; i++) {
    Lane& lane = lanes[i];
    lane.thread = i; lane.block = &block;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = stacks.data() + i * STACK_BYTES; lane.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&lane.context, lane_main, 0);
  }
  for (int left = THREADS; left;) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;   // Knuth's MMIX
    const int warp = (seed >> 33) % WARPS;
    for (int i = warp * 32; i < warp * 32 + 32; i++) {
      const bool done = lanes[i].done;
      take_turn(lanes[i]);
      left -= lanes[i].done != done;
    }
  }
}
extern "C" void host_launch(const char* name, u32 width, u32 height, const RowsParams* params, u64 seed) {
  kernel = !strcmp(name, "mktts_rows_qkv") ? mktts_rows_qkv : !strcmp(name, "mktts_rows_attend") ? mktts_rows_attend
         : !strcmp(name, "mktts_rows_out") ? mktts_rows_out : !strcmp(name, "mktts_rows_down") ? mktts_rows_down
         : !strcmp(name, "mktts_rows_gate_up") ? mktts_rows_gate_up : nullptr;
  if (!kernel) fail("no kernel of that name");
  launched = params;
  std::vector<u8> stacks(THREADS * STACK_BYTES);
  const u32 all = width * height, first = seed & 1 ? all - 1 : 0;
  for (u32 i = 0; i < all; i++) {
    const u32 at = first ? first - i : i;
    run_block(at % width, at / width, stacks, seed);
  }
}
