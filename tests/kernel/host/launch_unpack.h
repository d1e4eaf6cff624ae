// A launch of csrc/unpack.cu on one CPU thread: none of its threads waits for another.
extern "C" void host_launch(u32 width, u32 height, const Unpack* params) {
  Block block; Lane lane;
  block.rows = height; lane.block = &block; now = &lane;
  for (block.id = 0; block.id < width; block.id++)
    for (block.row = 0; block.row < height; block.row++)
      for (lane.thread = 0; lane.thread < blockDim.x; lane.thread++) mktts_unpack(*params);
}
