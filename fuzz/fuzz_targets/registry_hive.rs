#![no_main]
//! libFuzzer's way into `spillway_fuzz::registry_hive`, which owns what is tried.

libfuzzer_sys::fuzz_target!(|data: &[u8]| spillway_fuzz::registry_hive(data));
