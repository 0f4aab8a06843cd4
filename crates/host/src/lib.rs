//! The daemon that keeps images, catalogs and machines of a host.

pub mod api;
pub mod catalogs;
mod confined;
pub mod daemon;
pub mod error;
pub mod images;
mod nearest;
pub mod operations;
pub mod store;
pub mod stores;
