"""What a formatted answer may go on with: grammars compiled, and followed token by token."""
