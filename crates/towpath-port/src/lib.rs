//! Where packets come from and go to.
