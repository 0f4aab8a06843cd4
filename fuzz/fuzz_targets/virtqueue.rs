#![no_main]
//! libFuzzer's way into `spillway_fuzz::virtqueue`, which owns what is tried.

libfuzzer_sys::fuzz_target!(|data: &[u8]| spillway_fuzz::virtqueue(data));
