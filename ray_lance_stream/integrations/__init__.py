"""The stream within trainers that run the loop themselves: Lightning's, Hugging Face's."""
