//! How a guest or client reaches a disk: one folder per protocol, the same file names in each.

pub mod nbd;
pub mod vhost_user_blk;
