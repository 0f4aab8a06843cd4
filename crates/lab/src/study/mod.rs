//! Studies: scenarios compared by the same work, each in several runs, and everything that a run has left.
//!
//! Invariant: a run counts only once its record is whole on the disk; whoever reads results sees whole runs or none.

pub mod metric;
pub mod record;
pub mod report;
pub mod samples;
pub mod spec;

pub use metric::{Better, Kind, METRICS, Metric, View};
pub use record::{Action, RunRecord, StudyRecord};
pub use samples::{Row, Samples};
pub use spec::{Engine, Scenario, Study, Work};
