// BullMQ on Node: its free limiter, a counter in Redis that ends with its window; workers sleep until then.
import { spawn } from 'node:child_process';
import { appendFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const require = createRequire(`${process.cwd()}/`);
const { Queue, Worker } = require('bullmq');
const place = new URL(process.env.BENCH_URL);
const connection = { host: place.hostname, port: Number(place.port), maxRetriesPerRequest: null };
const RATE = Number(process.env.BENCH_RATE);
const OPTIONS = { removeOnComplete: true };
const BULK = 500;
const [step, first] = process.argv.slice(2);

const now = () => (performance.timeOrigin + performance.now()) / 1000;
const forever = () => new Promise(() => setInterval(() => {}, 1e6));

function start(processes, duration) {
  for (let i = 0; i < Number(processes); i++) {
    spawn(process.execPath, [process.argv[1], 'serve', String(duration)], { stdio: 'inherit' });
  }
  return forever();
}

const steps = {
  fill_rate: async () => {
    const queue = new Queue('bench', { connection });
    const began = performance.now();
    for (let left = Number(first); left > 0; left -= BULK) {
      const size = Math.min(BULK, left);
      const data = { key: 0, number: 0, text: 'x'.repeat(64) };
      await queue.addBulk(Array.from({ length: size }, () => ({ name: 'start', data, opts: OPTIONS })));
    }
    const seconds = (performance.now() - began) / 1000;
    await queue.close();
    return seconds;
  },
  work_rate: () => start(first, 100),
  work_window: () => start(first, 1000),
  serve: () => {
    const duration = Number(first);
    const handle = async () => appendFileSync(process.env.BENCH_LOG, `0 0 ${now().toFixed(6)} 0\n`);
    new Worker('bench', handle, { connection, concurrency: 100, limiter: { max: (RATE * duration) / 1000, duration } });
    return forever();
  },
};

console.log(JSON.stringify({ seconds: await steps[step]() }));
process.exit(0);
