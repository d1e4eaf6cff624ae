"""Many streams at once: engines that make one frame of every stream a tick."""
