// The cosines and sines of rope, the same bits on every machine.
#ifndef KVFERRY_ANGLES_H
#define KVFERRY_ANGLES_H

// For one position and `pairs` frequencies, each times `scale`. Angles are rounded to floats, as
// models were trained; what follows is right to 1e-10 for angles below 2**31.
void angles(int position, const float *frequencies, int pairs, float scale, float *cosines, float *sines);

#endif
