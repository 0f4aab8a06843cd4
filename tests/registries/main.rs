//! Registries as their users have them: the shipped programs, a server of S3, a web server and a folder; casync and minisign
//! as independent readers. And the web servers and OCI registries that images are imported from.
#![allow(clippy::unwrap_used)]

mod containers;
#[path = "../daemon_world/mod.rs"]
mod daemon_world;
mod downloads;
mod far;
mod fleet;
mod garbage;
mod hostile;
mod refusals;
mod replies;
mod scene;
mod sharing;
mod signed;
mod streamed;
