//! The shipped program with real clients: what a disk must show as a whole.
//!
//! Every test serves a disk of its own in a folder of its own and looks at it from outside: through its sockets,
//! its figures, and what the kernel says of its processes.

#![allow(clippy::unwrap_used, reason = "a test ends where a step fails")]

mod below;
mod bounded;
mod client;
mod deaths;
mod descriptors;
mod faults;
mod firmware;
mod full;
mod fullfs;
mod fuse;
mod garbage;
mod guest;
mod handshake;
mod hostile;
mod idle;
mod machine;
mod orphans;
mod points;
mod rate;
mod reconnect;
mod resets;
mod scene;
mod shared;
mod signals;
mod slow;
mod stops;
mod storage_models;
mod trace;
mod under_load;
mod verify;
mod viostor;
mod vmms;
mod world;
