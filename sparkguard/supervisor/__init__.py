"""The supervisor of runners: one llama.cpp process per loaded model, none started that cannot fit."""
