//! How a guest or client reaches a disk: one folder per protocol, the same file names in each.

mod error;
pub mod nbd;
pub mod vhost_user_blk;

pub use error::{Error, ErrorContext, ErrorKind, Figures};
