//! The daemon that manages images, catalogs and machines of a host.

pub mod access;
pub mod api;
pub mod backup;
pub mod catalogs;
mod confined;
mod copying;
pub mod daemon;
pub mod error;
pub mod events;
pub mod guest_users;
mod hypervisor;
pub mod idempotency;
pub mod images;
mod json_lines;
pub mod machines;
pub mod operations;
pub mod paging;
mod processes;
pub mod records;
pub mod resources;
mod scopes;
pub mod seed;
mod state_folder;
pub mod store;
pub mod stores;
pub mod systemd;
pub mod tags;
