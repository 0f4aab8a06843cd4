//! The loads that fio generates, by name, as the published measurements had them.
//!
//! Owns what each is; who runs it is fio inside of a machine, or the lab's own generator from the host: fio has no engine for
//! vhost-user. Invariant: both ask for the same sizes, shares and depths.

/// One load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    /// Its name in studies.
    pub name: &'static str,
    /// Bytes in a request, in KiB.
    pub request_kib: u32,
    /// Of a hundred requests, those that write.
    pub write_percent: u32,
    /// Of a hundred requests, those that go anywhere; the others follow the one before.
    pub random_percent: u32,
    /// Processes.
    pub workers: u32,
    /// Requests that each has in flight.
    pub depth: u32,
    /// The span that it runs over.
    pub size_mb: u32,
}

/// All of them.
pub const PROFILES: [Profile; 5] = [
    // Seed 004.
    Profile {
        name: "iometer-citrix",
        request_kib: 4,
        write_percent: 80,
        random_percent: 90,
        workers: 4,
        depth: 16,
        size_mb: 2560,
    },
    // Moyle's, of seed 002, with the 8 workers of seed 003.
    Profile {
        name: "iometer-vdi",
        request_kib: 4,
        write_percent: 80,
        random_percent: 80,
        workers: 8,
        depth: 32,
        size_mb: 1024,
    },
    // Seed 003.
    Profile {
        name: "fio-4k-x1",
        request_kib: 4,
        write_percent: 100,
        random_percent: 100,
        workers: 1,
        depth: 1,
        size_mb: 1024,
    },
    Profile {
        name: "fio-64k-x16",
        request_kib: 64,
        write_percent: 100,
        random_percent: 100,
        workers: 16,
        depth: 16,
        size_mb: 1024,
    },
    Profile {
        name: "fio-1m-x1",
        request_kib: 1024,
        write_percent: 100,
        random_percent: 100,
        workers: 1,
        depth: 1,
        size_mb: 1024,
    },
];
