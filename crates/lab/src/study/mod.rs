//! Studies: scenarios compared by the same work, each in several runs, and everything that a run has left.
//!
//! Invariant: a run counts only once its record is whole on the disk; whoever reads results sees whole runs or none.

pub mod disks;
pub mod expect;
pub mod folder;
pub mod metric;
pub mod record;
pub mod report;
pub mod run;
pub mod samples;
pub mod spec;
pub mod watch;

pub use expect::Expectation;
pub use folder::Folder;
pub use metric::{Better, Kind, METRICS, Metric, SUMS, View};
pub use record::{Action, RunFacts, RunRecord, StudyRecord};
pub use run::{Lab, Progress, Summary};
pub use samples::{Row, Samples};
pub use spec::{Engine, Image, Scenario, Study, Work};

/// The studies that come with the program.
pub fn shipped() -> anyhow::Result<Vec<Study>> {
    const FILES: [&str; 9] = [
        include_str!("../../../../studies/seed-000.toml"),
        include_str!("../../../../studies/seed-001.toml"),
        include_str!("../../../../studies/seed-001-desktops.toml"),
        include_str!("../../../../studies/seed-002.toml"),
        include_str!("../../../../studies/seed-002-iometer.toml"),
        include_str!("../../../../studies/seed-003.toml"),
        include_str!("../../../../studies/seed-004.toml"),
        include_str!("../../../../studies/seed-004-boot.toml"),
        include_str!("../../../../studies/small.toml"),
    ];
    FILES.into_iter().map(Study::parse).collect()
}
