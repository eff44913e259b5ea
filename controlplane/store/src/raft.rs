//! The replicated log on openraft and redb.
