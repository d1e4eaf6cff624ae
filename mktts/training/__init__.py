"""Training of the small voice: data, codec, talker. Not imported by the rest of the package."""
