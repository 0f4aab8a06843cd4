//! The fleet of the host, if it is in one (docs/design/060-fleets.md). Owns what the daemon does for that; the decisions are in the
//! crate `fleet`.
//!
//! Invariant: without etcd everything on the host goes on as before.

mod boot_set_waits;
pub mod claims;
mod copies;
mod details;
pub mod door;
pub mod etcd;
mod etcd_details;
pub mod events;
mod following;
mod image_details;
mod leaving;
mod named;
mod open;
mod options;
mod placing;
mod pulls;
mod queries;
mod record;
mod report;
mod report_writer;
mod restored;
mod rollout_details;
mod service;
mod share_pace;
mod shares;
mod token;
mod user_changes;
#[cfg(test)]
mod whole_fleet_tests;

pub(crate) use image_details::{image as fleet_image, images as fleet_images};
pub use leaving::{accept_restored_fleet, leave_fleet};
pub use open::{HostParts, OpenFleet};
pub use options::{FleetHostSettings, FleetOptions};
pub(crate) use record::RECORDS;
pub use service::{FleetParts, FleetService};
