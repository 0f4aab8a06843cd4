//! The process that serves one disk, and the supervisor's side of its launch.

pub mod base;
pub mod channel;
mod lifeline;
pub mod supervisor;
pub mod worker;
