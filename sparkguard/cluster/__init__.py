"""spark-serve: two or more Sparks, controlled and watched from a laptop. Nothing is installed on them."""
