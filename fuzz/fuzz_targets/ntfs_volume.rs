#![no_main]
//! libFuzzer's way into `spillway_fuzz::ntfs_volume`, which owns what is tried.

libfuzzer_sys::fuzz_target!(|data: &[u8]| spillway_fuzz::ntfs_volume(data));
