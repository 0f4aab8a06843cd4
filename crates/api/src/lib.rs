//! What `spillwayd` and its clients say to each other: the objects, what can be asked, and a client.
//!
//! Sizes are whole bytes in JSON and end in `_bytes`; times are RFC 3339 in UTC.

#![expect(unused_qualifications, reason = "what derives `ToSchema` writes paths in full")]

mod catalog;
pub mod client;
mod error;
mod image;
mod machine;
mod name;
mod operation;
mod size;
mod stores;

pub use catalog::{
    BaseCache, Catalog, CatalogKind, CatalogSpec, DiskMode, FullPolicy, HistoryEntry, Network, NewCatalog,
    OVERFLOW_BYTES_DEFAULT, RAM_BYTES_DEFAULT, ResetEvent,
};
pub use error::{ErrorBody, ErrorCode};
pub use image::{
    Image, ImageDetails, ImageImport, ImageRef, ImageVersion, Origin, SourceFormat, VersionChoice,
    VersionState,
};
pub use machine::{Identity, Machine};
pub use name::{Name, NameError};
pub use operation::{Operation, OperationState};
pub use size::{SizeError, parse_size};
pub use stores::{StoreClass, StoreFolder};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where the daemon listens if nothing else is said.
pub const DEFAULT_SOCKET: &str = "/run/spillway/spillwayd.sock";
/// The variable that says where it listens.
pub const SOCKET_VARIABLE: &str = "SPILLWAY_SOCKET";

/// A list of objects, in the order of their names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct List<T> {
    /// They.
    pub items: Vec<T>,
}

/// Nothing, where there is nothing to say but that it is done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Empty {}
