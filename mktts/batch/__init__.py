"""Many streams a tick. Without a device: tick, tick_model, board, scheduler, pages, admission; simulate plays them."""
