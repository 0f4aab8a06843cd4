//! The process that serves one disk, and the supervisor that starts it and outlives it.

pub mod channel;
mod lifeline;
pub mod supervisor;
pub mod worker;
