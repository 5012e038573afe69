"""The parts that llama.cpp builds its graphs of: one kind a file, each standing on those before it."""
