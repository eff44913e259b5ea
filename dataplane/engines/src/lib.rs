//! What each engine's legs look like on the wire.
