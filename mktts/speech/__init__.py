"""One utterance without a device: text, script, options, guard, chunks, and the stream a consumer reads."""
