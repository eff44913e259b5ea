//! What a pick costs, in time and memory: `cargo bench -p smg-policies`.
//!
//! Prompts begin with one of sixteen system prompts and are otherwise random letters. *New* prompts are picked for once, *known*
//! ones are repeats in random order. Sixteen workers, one thread. Where the system tells it, time is what the processor
//! spent, so that other load on the machine counts less.

use std::hint::black_box;
use std::time::Instant;

use smg_policies::{CacheAware, CacheAwareTuning, Candidate, Leg, Policy, PolicyName, RequestView, build};

const WORKERS: usize = 16;
const KNOWN: usize = 100_000;

fn word(seed: u64) -> u64 {
    let mixed = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

fn prompt(seed: u64, length: usize) -> String {
    let letter = |seed: u64| char::from(b'a' + (word(seed) % 26) as u8);
    let system = (0..64).map(|place| letter(seed % 16 * 1000 + place));
    system.chain((64..).map(|place| letter(seed << 20 | place))).take(length).collect()
}

/// Nanoseconds this thread has run on a processor, since the start of the thread where Linux says so.
fn processor_time(started: Instant) -> u128 {
    // Linux brings the count up to date when the thread gives way.
    std::thread::yield_now();
    let statistics = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let on_processor = statistics.split_whitespace().next().and_then(|field| field.parse().ok());
    on_processor.unwrap_or_else(|| started.elapsed().as_nanos())
}

fn nanoseconds(
    policy: &dyn Policy,
    fleet: &[Candidate<'_>],
    prompts: &[String],
    order: impl Iterator<Item = usize>,
) -> u128 {
    let order: Vec<usize> = order.collect();
    let clock = Instant::now();
    let started = processor_time(clock);
    for (index, entropy) in order.iter().zip(0..) {
        let key = &prompts[*index][..96];
        let request = RequestView::new("model").with_text(Some(&prompts[*index])).with_routing_key(None);
        let request =
            if policy.name() == PolicyName::CacheAware { request } else { request.with_routing_key(Some(key)) };
        black_box(policy.pick(fleet, &request.at(1), word(entropy)));
    }
    (processor_time(clock) - started) / order.len().max(1) as u128
}

fn row(label: &str, policy: &dyn Policy, fleet: &[Candidate<'_>], count: usize, length: usize) {
    let prompts: Vec<String> = (0..count as u64).map(|seed| prompt(seed, length)).collect();
    let new = nanoseconds(policy, fleet, &prompts, 0..count);
    let known = nanoseconds(policy, fleet, &prompts, (0..KNOWN as u64).map(|seed| word(seed) as usize % count));
    let footprint = policy.footprint();
    println!(
        "{label:<30} {count:>9} {length:>7} {new:>8} {known:>8} {:>10} {:>9.1}",
        footprint.entries,
        footprint.bytes as f64 / f64::from(1 << 20)
    );
}

fn main() {
    let urls: Vec<String> = (0..WORKERS).map(|index| format!("http://10.0.0.{index}:30000")).collect();
    let fleet: Vec<Candidate<'_>> =
        urls.iter().zip(1..).map(|(url, id)| Candidate::new(id << 64 | id, url, 0)).collect();
    println!("policy                           prompts  length   new/ns known/ns    entries       MiB");
    for count in [1_000, 10_000, 100_000] {
        for length in [256, 1024] {
            let roomy = CacheAware::new(CacheAwareTuning { max_tree_size: 1 << 30, ..Default::default() });
            row("cache_aware", &roomy, &fleet, count, length);
        }
    }
    row("cache_aware, 64 MiB, evicting", &CacheAware::default(), &fleet, 50_000, 4096);
    for name in [
        PolicyName::Manual,
        PolicyName::ConsistentHashing,
        PolicyName::PrefixHash,
        PolicyName::Bucket,
        PolicyName::LeastLoad,
        PolicyName::PowerOfTwo,
        PolicyName::RoundRobin,
        PolicyName::Random,
    ] {
        if let Ok(policy) = build(name, Leg::Prefill) {
            row(name.as_str(), &*policy, &fleet, 100_000, 256);
        }
    }
}
