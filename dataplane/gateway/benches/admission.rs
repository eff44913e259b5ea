//! What a slot of a decode worker costs where nobody contends for it, claim and release together: `cargo bench -p smg-gateway`.
//!
//! The gateway shares the worker with others, so that each claim looks at the lock, the lease and the clock.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use prometheus::IntCounter;
use smg_gateway::admission::decode::DecodeWindow;
use smg_gateway::admission::lease::Lease;
use smg_gateway::clock::since_boot;

const ROUNDS: u32 = 2_000_000;
const WAIT: Duration = Duration::from_secs(30);

fn main() -> Result<(), prometheus::Error> {
    let lease = Arc::new(Lease::new(false));
    let (waits, sheds) = (IntCounter::new("waits", "x")?, IntCounter::new("sheds", "x")?);
    let window = Arc::new(DecodeWindow::new(Arc::clone(&lease), waits, sheds));
    window.resize(Some(32));
    window.share(16, 8);
    lease.renew([since_boot() + 4 * WAIT; 2]);
    for _ in 0..3 {
        let began = Instant::now();
        for _ in 0..ROUNDS {
            drop(black_box(window.claim(1, WAIT).now_or_never()));
        }
        println!("claim and release of a slot: {} ns", (began.elapsed() / ROUNDS).as_nanos());
    }
    Ok(())
}
