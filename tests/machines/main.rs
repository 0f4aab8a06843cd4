//! Machines of catalogs, run by `spillwayd`: real guests on real disks.
#![allow(clippy::unwrap_used)]

mod adopted;
mod agent;
mod boots;
mod browser;
mod cockpit;
mod commit;
mod console;
mod crash;
mod external;
mod figures;
mod firmware;
mod guests;
mod hardware;
mod libvirt;
mod libvirtd;
mod life;
mod off;
mod phone;
mod pool;
mod power;
mod proxmox;
mod restore;
mod scratch;
mod streamed;
mod unrecorded;
mod users;
mod world;
