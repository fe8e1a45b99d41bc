//! Wire views: headers checked once, then read by offset.
