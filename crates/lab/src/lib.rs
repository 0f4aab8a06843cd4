//! The lab that users run: studies and their reports, workloads, replay of traces, and what the bench and the demo share.
//!
//! Knows the product only by its command line, its sockets and its printed counters, never by its insides.

pub mod chart;
pub mod markup;
mod numbers;
mod picture;
pub mod predict;
pub mod probe;
pub mod replay;
pub mod stamp;
pub mod study;
mod template;
pub mod workload;

pub use stamp::Stamp;
