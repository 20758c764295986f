"""From a conversation to token ids and block keys; what is known is not computed again."""
