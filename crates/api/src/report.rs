//! Reports of the lab that are kept on the host.

use crate::Name;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A report of `spillway lab` in the daemon's state folder: `reports/NAME/report.html`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Report {
    /// Name of the report's folder.
    pub name: Name,
    /// Time at which the report was written.
    #[schema(value_type = String, format = DateTime)]
    pub written: Timestamp,
    /// Size of the page, in bytes.
    pub bytes: u64,
}
