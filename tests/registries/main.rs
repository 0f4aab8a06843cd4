//! Registries as their users have them: the shipped programs, a server of S3, a web server and a folder; casync and minisign
//! as independent readers.
#![allow(clippy::unwrap_used)]

#[path = "../daemon_world/mod.rs"]
mod daemon_world;
mod garbage;
mod hostile;
mod refusals;
mod scene;
mod sharing;
mod signed;
mod streamed;
