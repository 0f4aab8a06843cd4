//! The process that serves one disk, and the supervisor's side of its launch.

pub mod base;
pub mod channel;
pub mod kvm;
mod lifeline;
pub mod persistent_file;
pub mod storage_model;
pub mod supervisor;
pub mod trace_ring;
pub mod worker;
