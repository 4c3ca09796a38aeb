"""Stage one: corpus -> sequences -> teacher -> codec -> shards."""
